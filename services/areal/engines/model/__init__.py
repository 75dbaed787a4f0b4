"""A model as training sees it: loaded, packed, checked, under the names of the Hub."""
