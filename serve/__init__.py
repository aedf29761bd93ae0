"""HTTP and offline front ends. Nothing lives here yet: see docs/design.md for what will."""
