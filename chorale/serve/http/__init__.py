"""The HTTP side of a server: opens the app, serves it and drains it."""
