"""The processes of a running server: the supervisor, the HTTP side, and in ``engine`` those on the device."""
