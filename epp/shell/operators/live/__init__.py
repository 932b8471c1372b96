"""What a picker does now, as data and as a page that watches."""
