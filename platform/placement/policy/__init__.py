"""Maps of layers to devices, and which is best (HELR). Pure."""
