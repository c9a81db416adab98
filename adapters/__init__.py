"""Thin adapters that put frameworks on the shared engine (imported as ``paged_backend.adapters``)."""
