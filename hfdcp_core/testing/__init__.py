"""What tests, the demo and users' own tests run on: a Hub on loopback, a faulty store, checkpoint builders.

Nothing here is used by the product itself, and nothing here is safe to expose to a network.
"""
