//! The stores that are crates of their own, on real servers.

mod backend;
mod doctor_support;
mod etcd_conformance;
mod etcd_doctor;
mod etcd_faults;
mod etcd_locks;
mod leaders;
mod mysql_conformance;
mod mysql_doctor;
mod mysql_faults;
mod mysql_locks;
mod mysql_support;
mod postgres_conformance;
mod postgres_doctor;
mod postgres_faults;
mod postgres_hold;
mod postgres_layer;
mod postgres_locks;
mod postgres_once;
mod postgres_read_write;
mod postgres_records;
mod postgres_transaction;
mod scenes;
mod zookeeper_conformance;
mod zookeeper_doctor;
mod zookeeper_faults;
