"""The development server: a base path of SavedModel versions over HTTP."""
