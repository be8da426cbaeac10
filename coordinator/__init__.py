"""The service that seals versions and announces them.

Agents import ``client``, ``wire``, ``backoff`` and ``errors``, which need no web framework; the rest is the server.
``decisions``, ``fleet`` and ``events`` are pure: facts in, what to write or say out.
"""
