"""Tables, charts and pages of what was measured."""
