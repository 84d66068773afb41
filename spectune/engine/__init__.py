"""This decodes: the target model, its cache, sampling, verification and the batch loop."""
