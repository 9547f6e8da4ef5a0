"""The frozen target, its cache, sampling, verification rules, the decode loop and evaluation."""
