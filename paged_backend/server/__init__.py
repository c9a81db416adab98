"""OpenAI-compatible HTTP server. ``paged-backend serve MODEL``, or :func:`paged_backend.server.app.create_app`."""
