"""The text of PDF files, read in a process of its own."""
