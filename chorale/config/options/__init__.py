"""The options of ``chorale serve``: one table, read from the command line, the environment and YAML."""
