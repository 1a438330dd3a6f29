"""Nodes under random faults: is every answer right, whoever stays answered, nothing kept?"""
