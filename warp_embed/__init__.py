"""Run a mixture-of-experts language model inside your Python program, within the memory you allow."""
