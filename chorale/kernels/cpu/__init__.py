"""The CPU back end: ops in C++ (``native/``) for x86-64 and ARM, called by ctypes."""
