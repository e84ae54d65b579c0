"""swapkv"""
