"""What a network costs and how it works: counting, and looking inside."""
