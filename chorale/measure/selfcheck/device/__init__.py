"""Checks that need torch, in a child process: of the checkpoint's files, and of the ops on the device."""
