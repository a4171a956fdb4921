"""What scripts/make_goldens.py is made of; nothing here knows jaxinfer."""
