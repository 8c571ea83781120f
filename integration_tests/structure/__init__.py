"""The shape of the packages: folders, imports, and the way that a gradient takes."""
