"""The processes of a server: the supervisor, the HTTP processes (``http``) and the engine (``engine``)."""
