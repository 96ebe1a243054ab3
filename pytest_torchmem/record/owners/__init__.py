"""Who owns a storage, and which storages are alive."""
