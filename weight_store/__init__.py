"""What lies in the bucket: keys, records and chain rules, the store port and its adapters. LAYOUT.md is the norm."""
