"""The self-check: does this machine, with this checkpoint and these options, compute correct results?

``table.py`` lists the checks. Checks of the files and the device run in a child process (``device/``),
checks of the server over HTTP (``serving/``). ``run.py`` runs all of them, each with a time limit.
Only ``device/`` imports torch.
"""
