"""Checks that need torch, of the checkpoint's files and the device's ops. They run in a child process."""
