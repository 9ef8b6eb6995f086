"""HARTS inside other trainers: one thin module each, imported by name (`harts.integrations.trl`)."""
