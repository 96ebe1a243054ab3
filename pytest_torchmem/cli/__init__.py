"""The ``torchmem`` command: reads results, baselines and traces; needs neither torch nor pytest."""
