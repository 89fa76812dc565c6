"""Flows that read like the sentence they implement, and the command line."""
