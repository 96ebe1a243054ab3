"""Reports that are text: the terminal, Markdown, GitHub."""
