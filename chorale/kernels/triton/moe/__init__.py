"""Router and MXFP4 experts."""
