"""The commands of ``paged-backend``, one module each. At import none of them loads torch or the engine."""
