"""The whole path on one machine: real S3 server, coordinator, training job, rollout agents, and a proof at the end.

``run`` drives everything; ``trainer`` is the program that each rank runs; ``policy``, ``task`` and ``learning`` are the
training job itself; ``cast`` starts and ends processes; ``proof`` compares bytes without our digests; ``show`` draws.
"""
