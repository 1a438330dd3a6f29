"""The same requests to a real node as a cost file has it, and to one with other flags: does advice hold outside?"""
