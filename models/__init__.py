"""shardplan.models"""
