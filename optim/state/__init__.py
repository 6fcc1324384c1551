"""The common state: layout of the flat vector, its fragments, outer state and outer step."""
