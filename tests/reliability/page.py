def write_page(record, target):
    pass
