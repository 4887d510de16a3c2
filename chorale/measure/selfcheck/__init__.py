"""The self-check: does this machine, with this checkpoint and these options, compute what it should?

``table.py`` lists the checks. Those of the files and of the device run in a child process (``device/``),
those of the server over HTTP (``serving/``), and ``run.py`` runs all of them, each within its time limit.
Only ``device/`` imports torch.
"""
