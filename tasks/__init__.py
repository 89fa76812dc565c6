"""The five steps as Prefect tasks: each is options, one call into the core, and one log line."""
