"""CPython compiled to WebAssembly: the sandbox that needs nothing but two packages of Python.

``host`` is the process of one session. ``calls`` and ``file_calls`` hold every function that the code inside
can reach, and ``files`` the file system that these functions show: it exists in memory only.
"""
