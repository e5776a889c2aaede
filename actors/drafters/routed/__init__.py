"""Several draft models, of which one drafts for a request, by its prompt."""
