def test_imports():
    import epp
