"""From events to storages, their categories and the footprint over time."""
