"""Where models' weights are: folders, hub ids, packaged demo models."""
