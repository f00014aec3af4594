"""Importing this module rehearses a forkserver; its forks then only set their device."""

from taas.rehearsal import install

install(0, 1)
