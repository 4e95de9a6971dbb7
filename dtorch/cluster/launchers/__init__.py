"""Existing engines that start workers on machines and keep them there.

``base`` says what a launcher is, ``watch`` decides which workers are to be started anew (pure), ``up`` runs it all. Engines:
``local`` (processes of this machine), ``ray`` (an actor for each worker). ``kubernetes`` and ``slurm`` write the files that
their engines read (pure).
"""
