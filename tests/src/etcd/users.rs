//! Users of a server, and their rights.

use serde_json::{Value, json};

use super::{Etcd, range};

impl Etcd {
    /// Adds a user with a role of the same name, which may read and write all keys that begin so.
    ///
    /// # Panics
    /// When the server refuses.
    pub async fn add_user(&self, user: &str, password: &str, prefix: Option<&str>) {
        self.asked("auth/user/add", json!({"name": user, "password": password}))
            .await;
        self.asked("auth/role/add", json!({"name": user})).await;
        if let Some(prefix) = prefix {
            self.grant_rights(user, prefix, "READWRITE").await;
        }
        self.grant_role(user, user).await;
    }

    /// Gives a role these rights (`READ` or `READWRITE`) on the keys that begin so, instead of others.
    ///
    /// # Panics
    /// When the server refuses.
    pub async fn grant_rights(&self, role: &str, prefix: &str, rights: &str) {
        let mut perm = range(prefix);
        perm["permType"] = rights.into();
        self.asked("auth/role/grant", json!({"name": role, "perm": perm}))
            .await;
    }

    /// Gives a user a role.
    ///
    /// # Panics
    /// When the server refuses.
    pub async fn grant_role(&self, user: &str, role: &str) {
        self.asked("auth/user/grant", json!({"user": user, "role": role}))
            .await;
    }

    /// Enables authentication. From now on [`ask`](Etcd::ask) logs in as `root` with this password.
    ///
    /// # Panics
    /// When the server refuses.
    pub async fn enable_authentication(&self, root: &str) {
        self.asked("auth/enable", json!({})).await;
        *self.root.lock() = Some(root.to_owned());
    }

    async fn asked(&self, path: &str, body: Value) {
        assert!(self.ask(path, &body).await.is_some(), "{path}");
    }
}
