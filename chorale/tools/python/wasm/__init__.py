"""CPython compiled to WebAssembly: a sandbox that requires only two Python packages.

``host`` is the process of a session. ``calls`` and ``file_calls`` contain every function that the code inside
can call, and ``files`` the in-memory file system behind them.
"""
