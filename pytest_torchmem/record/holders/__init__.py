"""Who keeps a storage alive, and how one gets there."""
