"""What deltas cost: the benchmark beside other codecs, statistics of a user's own checkpoints, and deltas to try.

Nothing here is needed to run the service. Other codecs are imported only when asked for, and only if installed.
"""
