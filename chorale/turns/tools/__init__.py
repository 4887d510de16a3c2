"""Tools within a turn: built-in tools run by the server, tools of the client, and the choice between them."""
