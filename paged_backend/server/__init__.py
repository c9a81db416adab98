"""OpenAI-compatible HTTP server. ``paged-backend serve MODEL``, or :func:`paged_backend.server.run.app.create_app`."""
