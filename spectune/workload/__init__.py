"""This asks: it reads, samples and names the prompts."""
